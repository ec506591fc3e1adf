//! The file of a SentencePiece model: the fields of its protobuf message that encoding needs.

use tessera_base::Diagnostic;

use crate::codes::T0451;

/// What kind of text a piece stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PieceKind {
    /// Text that the model learned.
    Normal,
    /// Text that someone declared; it is never split.
    UserDefined,
    /// One byte, `<0x00>` to `<0xFF>`.
    Byte,
    /// A piece that no text contains: the unknown piece, control symbols, unused ids.
    Symbol,
}

/// A piece of the vocabulary; its position is its id.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Piece {
    pub(crate) text: String,
    pub(crate) score: f32,
    pub(crate) kind: PieceKind,
}

/// A SentencePiece model.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SpieceFile {
    pub(crate) pieces: Vec<Piece>,
    pub(crate) unknown_id: usize,
    pub(crate) byte_fallback: bool,
    /// The normalization of characters, in the format of [`crate::charsmap`]; empty for none.
    pub(crate) charsmap: Vec<u8>,
    pub(crate) adds_prefix: bool,
    pub(crate) removes_extra_spaces: bool,
    pub(crate) escapes_spaces: bool,
}

/// The number of a unigram model in the trainer's settings.
const UNIGRAM: u64 = 1;

impl SpieceFile {
    /// Reads the message `ModelProto`.
    ///
    /// # Errors
    /// T0451 if the bytes are no such message, or describe no unigram model.
    pub(crate) fn parse(file: &str, bytes: &[u8]) -> Result<SpieceFile, Diagnostic> {
        let refuse = |why: String| {
            Diagnostic::error(&T0451, "the SentencePiece model cannot be read")
                .with_label(file, why)
                .with_hint("fetch the file again from the publisher of the model")
        };
        let mut model = SpieceFile {
            pieces: Vec::new(),
            unknown_id: 0,
            byte_fallback: false,
            charsmap: Vec::new(),
            adds_prefix: true,
            removes_extra_spaces: true,
            escapes_spaces: true,
        };
        let mut model_type = UNIGRAM;
        let broken = |at: usize| refuse(format!("byte {at} of {}: no protobuf field", bytes.len()));
        for field in Fields::new(bytes) {
            match field.map_err(broken)? {
                (1, Value::Bytes(piece)) => {
                    let number = model.pieces.len();
                    model.pieces.push(read_piece(piece).ok_or_else(|| refuse(format!("piece {number}")))?);
                }
                (2, Value::Bytes(trainer)) => model_type = model.read_trainer(trainer).map_err(broken)?,
                (3, Value::Bytes(rules)) => model.read_normalizer(rules).map_err(broken)?,
                _ => {}
            }
        }
        if model.pieces.is_empty() {
            return Err(refuse(format!("no pieces in {} bytes", bytes.len())));
        }
        if model_type != UNIGRAM {
            return Err(refuse(format!("model type {model_type}; expected {UNIGRAM}, a unigram model")));
        }
        match model.pieces.get(model.unknown_id).map(|p| p.kind) {
            Some(PieceKind::Symbol) => Ok(model),
            _ => Err(refuse(format!("id {} is not the unknown piece", model.unknown_id))),
        }
    }

    /// Reads `TrainerSpec` and returns the type of the model.
    fn read_trainer(&mut self, bytes: &[u8]) -> Result<u64, usize> {
        let mut model_type = UNIGRAM;
        for field in Fields::new(bytes) {
            match field? {
                (3, Value::Number(n)) => model_type = n,
                (35, Value::Number(n)) => self.byte_fallback = n != 0,
                (40, Value::Number(n)) => self.unknown_id = usize::try_from(n).unwrap_or(usize::MAX),
                _ => {}
            }
        }
        Ok(model_type)
    }

    /// Reads `NormalizerSpec`.
    fn read_normalizer(&mut self, bytes: &[u8]) -> Result<(), usize> {
        for field in Fields::new(bytes) {
            match field? {
                (2, Value::Bytes(map)) => self.charsmap = map.to_vec(),
                (3, Value::Number(n)) => self.adds_prefix = n != 0,
                (4, Value::Number(n)) => self.removes_extra_spaces = n != 0,
                (5, Value::Number(n)) => self.escapes_spaces = n != 0,
                _ => {}
            }
        }
        Ok(())
    }
}

fn read_piece(bytes: &[u8]) -> Option<Piece> {
    let mut piece = Piece { text: String::new(), score: 0.0, kind: PieceKind::Normal };
    for field in Fields::new(bytes) {
        match field.ok()? {
            (1, Value::Bytes(text)) => piece.text = String::from_utf8(text.to_vec()).ok()?,
            (2, Value::Word(bits)) => piece.score = f32::from_bits(bits),
            (3, Value::Number(kind)) => {
                piece.kind = match kind {
                    1 => PieceKind::Normal,
                    2 | 3 | 5 => PieceKind::Symbol,
                    4 => PieceKind::UserDefined,
                    6 => PieceKind::Byte,
                    _ => return None,
                };
            }
            _ => {}
        }
    }
    piece.score.is_finite().then_some(piece)
}

/// The value of a protobuf field.
enum Value<'a> {
    Number(u64),
    Word(u32),
    Bytes(&'a [u8]),
    /// Eight bytes, which no field of interest has.
    Other,
}

/// Iterates over the fields of a protobuf message: number and value, or the offset of a byte that
/// begins none.
struct Fields<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Fields<'a> {
    fn new(bytes: &'a [u8]) -> Fields<'a> {
        Fields { bytes, at: 0 }
    }

    fn read_varint(&mut self) -> Option<u64> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = *self.bytes.get(self.at)?;
            self.at += 1;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    fn read_bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let bytes = self.bytes.get(self.at..self.at.checked_add(len)?)?;
        self.at += len;
        Some(bytes)
    }

    fn read_field(&mut self) -> Option<(u64, Value<'a>)> {
        let tag = self.read_varint()?;
        let value = match tag & 7 {
            0 => Value::Number(self.read_varint()?),
            1 => self.read_bytes(8).map(|_| Value::Other)?,
            2 => {
                let len = usize::try_from(self.read_varint()?).ok()?;
                Value::Bytes(self.read_bytes(len)?)
            }
            5 => Value::Word(u32::from_le_bytes(self.read_bytes(4)?.try_into().ok()?)),
            _ => return None,
        };
        Some((tag >> 3, value))
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(u64, Value<'a>), usize>;

    fn next(&mut self) -> Option<Self::Item> {
        let start = self.at;
        if start >= self.bytes.len() {
            return None;
        }
        match self.read_field() {
            Some(field) => Some(Ok(field)),
            None => {
                self.at = self.bytes.len();
                Some(Err(start))
            }
        }
    }
}
