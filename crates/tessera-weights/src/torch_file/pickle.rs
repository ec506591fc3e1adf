//! A reader of the pickle inside a PyTorch checkpoint: containers, numbers, text and tensors.
//!
//! Pickle is a program for a stack machine that can import and call anything. This reader knows six
//! functions by name, builds plain values in their place, and refuses every other name. It calls
//! nothing. The reader of Flight Recorder dumps in `tessera-torch` accepts no name at all and takes
//! a list entry by entry; the two share no code, because nearly every opcode differs in what it
//! keeps.
//!
//! Values lie in one list and refer to each other by index, so that no value can contain itself in a
//! way that recursion would follow: the limits are on the list, and dropping it takes no recursion.

use std::collections::HashMap;

/// Maximum number of values. The state of an optimizer for 2000 tensors takes about 200 000.
const MAX_VALUES: usize = 1 << 21;
/// Maximum bytes of one text.
const MAX_TEXT: usize = 1 << 20;
/// Maximum bytes of the name of a module or of a function.
const MAX_NAME: usize = 256;
/// Maximum dims of a tensor.
const MAX_DIMS: usize = 8;

/// Index of a value in [`Values`].
pub(super) type ValueId = u32;

/// All values of a pickle.
#[derive(Debug, Default)]
pub(super) struct Values(Vec<Value>);

/// A value of a pickle.
#[derive(Debug)]
pub(super) enum Value {
    /// None, or a number with a fraction, or the state of an object: nothing here needs it.
    Opaque,
    Bool,
    Int(i64),
    Text(Box<str>),
    /// A list or a tuple.
    Sequence(Vec<ValueId>),
    Dict(Vec<(ValueId, ValueId)>),
    Name(KnownName),
    Storage(StorageRef),
    Tensor(TensorRef),
}

/// A name that a pickle may import.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KnownName {
    OrderedDict,
    RebuildTensor,
    RebuildTensorOfDtype,
    RebuildParameter,
    /// The class of a storage, with the safetensors name of its dtype.
    StorageOf(&'static str),
    UntypedStorage,
    /// A dtype, by its safetensors name.
    Dtype(&'static str),
}

/// The elements of one or several tensors: an entry of the archive.
#[derive(Debug, Clone)]
pub(super) struct StorageRef {
    /// Name of the entry below `data/`.
    pub(super) key: Box<str>,
    /// The dtype, unless the tensor states it.
    pub(super) dtype: Option<&'static str>,
}

/// A tensor: a view of a storage, counted in elements.
#[derive(Debug, Clone)]
pub(super) struct TensorRef {
    pub(super) storage: Box<str>,
    pub(super) dtype: &'static str,
    pub(super) offset: u64,
    pub(super) shape: Vec<u64>,
    pub(super) strides: Vec<u64>,
}

impl Values {
    pub(super) fn get(&self, id: ValueId) -> &Value {
        // Every id was given out by `push`, which never removes.
        &self.0[id as usize]
    }

    fn push(&mut self, value: Value) -> Step<ValueId> {
        if self.0.len() >= MAX_VALUES {
            return malformed(format!("more than {MAX_VALUES} values"));
        }
        self.0.push(value);
        Ok((self.0.len() - 1) as ValueId)
    }

    fn sequence(&self, id: ValueId) -> Option<&[ValueId]> {
        if let Value::Sequence(items) = self.get(id) { Some(items) } else { None }
    }

    fn text(&self, id: ValueId) -> Option<&str> {
        if let Value::Text(text) = self.get(id) { Some(text) } else { None }
    }

    fn count(&self, id: ValueId) -> Option<u64> {
        if let Value::Int(n) = self.get(id) { u64::try_from(*n).ok() } else { None }
    }

    fn counts(&self, id: ValueId) -> Option<Vec<u64>> {
        let items = self.sequence(id).filter(|items| items.len() <= MAX_DIMS)?;
        items.iter().map(|i| self.count(*i)).collect()
    }
}

/// Why a pickle was rejected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum PickleProblem {
    /// A name that is not among the known ones, and the byte at which the pickle imports it.
    Imports(String, usize),
    /// An opcode that builds or calls an object, and its byte.
    Executes(&'static str, usize),
    /// The opcodes do not fit together, or exceed a limit; and the byte.
    Malformed(String, usize),
}

/// Reads a pickle; returns all values and the id of the one that it stands for.
///
/// # Errors
/// The first opcode that is rejected.
pub(super) fn read_pickle(bytes: &[u8]) -> Result<(Values, ValueId), PickleProblem> {
    let mut machine =
        Machine { bytes, at: 0, values: Values::default(), stack: Vec::new(), memo: HashMap::new() };
    loop {
        let at = machine.at;
        match machine.execute_next() {
            Ok(None) => {}
            Ok(Some(root)) => return Ok((machine.values, root)),
            Err(Refusal::Imports(name)) => return Err(PickleProblem::Imports(name, at)),
            Err(Refusal::Executes(name)) => return Err(PickleProblem::Executes(name, at)),
            Err(Refusal::Malformed(why)) => return Err(PickleProblem::Malformed(why, at)),
        }
    }
}

enum Refusal {
    Imports(String),
    Executes(&'static str),
    Malformed(String),
}

type Step<T> = Result<T, Refusal>;

fn malformed<T>(why: impl Into<String>) -> Step<T> {
    Err(Refusal::Malformed(why.into()))
}

struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    values: Values,
    /// Ids of values; `None` is a mark.
    stack: Vec<Option<ValueId>>,
    memo: HashMap<u32, ValueId>,
}

impl Machine<'_> {
    /// Executes an opcode; returns the value of the pickle at its end.
    fn execute_next(&mut self) -> Step<Option<ValueId>> {
        let opcode = self.take_array::<1>()?[0];
        let value = match opcode {
            b'.' => return self.pop().map(Some),
            b'N' => Value::Opaque,
            0x88 | 0x89 => Value::Bool,
            b'K' => Value::Int(i64::from(self.take_array::<1>()?[0])),
            b'M' => Value::Int(i64::from(u16::from_le_bytes(self.take_array()?))),
            b'J' => Value::Int(i64::from(i32::from_le_bytes(self.take_array()?))),
            0x8a => self.read_long()?,
            b'G' => {
                self.take(8)?;
                Value::Opaque
            }
            b'X' => {
                let n = u32::from_le_bytes(self.take_array()?);
                self.read_text(n as usize)?
            }
            0x8c => {
                let n = self.take_array::<1>()?[0];
                self.read_text(n.into())?
            }
            b'}' => Value::Dict(Vec::new()),
            b']' | b')' => Value::Sequence(Vec::new()),
            0x85..=0x87 => {
                let n = usize::from(opcode - 0x84);
                let mut items = (0..n).map(|_| self.pop()).collect::<Step<Vec<_>>>()?;
                items.reverse();
                Value::Sequence(items)
            }
            b't' => Value::Sequence(self.pop_to_mark()?),
            b'c' => {
                let (module, name) = (self.read_line()?, self.read_line()?);
                find_name(&module, &name)?
            }
            0x93 => {
                let (name, module) = (self.pop()?, self.pop()?);
                match (self.values.text(module), self.values.text(name)) {
                    (Some(module), Some(name)) => find_name(module, name)?,
                    _ => return malformed("an import without a name"),
                }
            }
            b'Q' => self.load_storage()?,
            b'R' => self.call()?,
            _ => return self.execute_effect(opcode).map(|()| None),
        };
        let id = self.values.push(value)?;
        self.stack.push(Some(id));
        Ok(None)
    }

    /// Executes an opcode that creates no value.
    fn execute_effect(&mut self, opcode: u8) -> Step<()> {
        match opcode {
            // The protocol, and the length of a frame.
            0x80 => self.take(1).map(drop),
            0x95 => self.take(8).map(drop),
            b'(' => {
                // Marks take memory as values do.
                if self.stack.len() >= MAX_VALUES {
                    return malformed(format!("more than {MAX_VALUES} values on the stack"));
                }
                self.stack.push(None);
                Ok(())
            }
            b'q' => {
                let index = u32::from(self.take_array::<1>()?[0]);
                self.remember(index)
            }
            b'r' => {
                let index = u32::from_le_bytes(self.take_array()?);
                self.remember(index)
            }
            0x94 => self.remember(self.memo.len() as u32),
            b'h' => {
                let index = u32::from(self.take_array::<1>()?[0]);
                self.recall(index)
            }
            b'j' => {
                let index = u32::from_le_bytes(self.take_array()?);
                self.recall(index)
            }
            b'a' => {
                let item = self.pop()?;
                self.extend_list(vec![item])
            }
            b'e' => {
                let items = self.pop_to_mark()?;
                self.extend_list(items)
            }
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.extend_dict(&[key, value])
            }
            b'u' => {
                let items = self.pop_to_mark()?;
                self.extend_dict(&items)
            }
            b'b' => {
                // The state of an OrderedDict is the `_metadata` of a state dict: format versions.
                self.pop()?;
                match self.top()? {
                    id if matches!(self.values.get(id), Value::Dict(_)) => Ok(()),
                    _ => Err(Refusal::Executes("BUILD")),
                }
            }
            _ => Err(match executing_opcode(opcode) {
                Some(name) => Refusal::Executes(name),
                None => {
                    Refusal::Malformed(format!("the opcode {opcode:#04x}, which torch.save does not use"))
                }
            }),
        }
    }

    /// Executes a call of a known function: builds the value that it would return.
    fn call(&mut self) -> Step<Value> {
        let (arguments, function) = (self.pop()?, self.pop()?);
        let Some(args) = self.values.sequence(arguments) else {
            return malformed("a call without arguments");
        };
        let Value::Name(function) = self.values.get(function) else {
            return Err(Refusal::Executes("REDUCE"));
        };
        match function {
            KnownName::OrderedDict if args.is_empty() => Ok(Value::Dict(Vec::new())),
            KnownName::OrderedDict => malformed("an OrderedDict from arguments"),
            KnownName::RebuildParameter => match args {
                [data, ..] => match self.values.get(*data) {
                    Value::Tensor(tensor) => Ok(Value::Tensor(tensor.clone())),
                    _ => malformed("a parameter that is not a tensor"),
                },
                [] => malformed("a parameter without a tensor"),
            },
            KnownName::RebuildTensor => self.build_tensor(args, None),
            KnownName::RebuildTensorOfDtype => {
                let dtype = args.get(6).map(|id| self.values.get(*id));
                match dtype {
                    Some(Value::Name(KnownName::Dtype(name))) => self.build_tensor(args, Some(name)),
                    _ => malformed("a tensor without its dtype"),
                }
            }
            // A class of storages or a dtype is a value that nothing calls.
            KnownName::StorageOf(_) | KnownName::UntypedStorage | KnownName::Dtype(_) => {
                Err(Refusal::Executes("REDUCE"))
            }
        }
    }

    fn build_tensor(&self, args: &[ValueId], dtype: Option<&'static str>) -> Step<Value> {
        let [storage, offset, shape, strides, ..] = args else {
            return malformed("a tensor with less than four arguments");
        };
        let Value::Storage(storage) = self.values.get(*storage) else {
            return malformed("a tensor without a storage");
        };
        let Some(dtype) = dtype.or(storage.dtype) else { return malformed("a tensor without a dtype") };
        let v = &self.values;
        match (v.count(*offset), v.counts(*shape), v.counts(*strides)) {
            (Some(offset), Some(shape), Some(strides)) if shape.len() == strides.len() => {
                Ok(Value::Tensor(TensorRef { storage: storage.key.clone(), dtype, offset, shape, strides }))
            }
            _ => malformed(format!(
                "a tensor whose shape and strides are not lists of up to {MAX_DIMS} counts"
            )),
        }
    }

    /// Loads what the pickle stores outside of itself: ('storage', class, key, device, elements).
    fn load_storage(&mut self) -> Step<Value> {
        let id = self.pop()?;
        let v = &self.values;
        if let Some([tag, class, key, ..]) = v.sequence(id)
            && v.text(*tag) == Some("storage")
            && let (Value::Name(class), Some(key)) = (v.get(*class), v.text(*key))
        {
            let dtype = match class {
                KnownName::StorageOf(dtype) => Some(*dtype),
                KnownName::UntypedStorage => None,
                _ => return malformed("a storage whose class is none"),
            };
            return Ok(Value::Storage(StorageRef { key: key.into(), dtype }));
        }
        malformed("an object outside of the pickle that is not a storage")
    }

    fn extend_list(&mut self, items: Vec<ValueId>) -> Step<()> {
        let list = self.top()?;
        match &mut self.values.0[list as usize] {
            Value::Sequence(list) => {
                list.extend(items);
                Ok(())
            }
            _ => malformed("items without a list"),
        }
    }

    fn extend_dict(&mut self, items: &[ValueId]) -> Step<()> {
        let (pairs, rest) = items.as_chunks::<2>();
        let dict = self.top()?;
        match &mut self.values.0[dict as usize] {
            Value::Dict(dict) if rest.is_empty() => {
                dict.extend(pairs.iter().map(|[key, value]| (*key, *value)));
                Ok(())
            }
            _ => malformed("keys without a dict, or a key without a value"),
        }
    }

    fn remember(&mut self, index: u32) -> Step<()> {
        let top = self.top()?;
        if self.memo.len() >= MAX_VALUES {
            return malformed(format!("more than {MAX_VALUES} values in the memo"));
        }
        self.memo.insert(index, top);
        Ok(())
    }

    fn recall(&mut self, index: u32) -> Step<()> {
        let Some(id) = self.memo.get(&index) else { return malformed(format!("no memo {index}")) };
        if self.stack.len() >= MAX_VALUES {
            return malformed(format!("more than {MAX_VALUES} values on the stack"));
        }
        self.stack.push(Some(*id));
        Ok(())
    }

    fn top(&self) -> Step<ValueId> {
        self.stack.last().copied().flatten().map_or_else(|| malformed("an opcode without its operand"), Ok)
    }

    fn pop(&mut self) -> Step<ValueId> {
        self.stack.pop().flatten().map_or_else(|| malformed("an opcode without its operand"), Ok)
    }

    fn pop_to_mark(&mut self) -> Step<Vec<ValueId>> {
        let Some(mark) = self.stack.iter().rposition(Option::is_none) else {
            return malformed("an opcode without its mark");
        };
        let items = self.stack.drain(mark..).flatten().collect();
        Ok(items)
    }

    fn read_long(&mut self) -> Step<Value> {
        let n = usize::from(self.take_array::<1>()?[0]);
        let bytes = self.take(n)?;
        if n > 8 {
            return malformed("a whole number of more than 64 bits");
        }
        // Two's complement, little endian, as long as its value needs.
        let fill = if bytes.last().is_some_and(|b| b & 0x80 != 0) { 0xff } else { 0 };
        let mut word = [fill; 8];
        word[..n].copy_from_slice(bytes);
        Ok(Value::Int(i64::from_le_bytes(word)))
    }

    fn read_text(&mut self, n: usize) -> Step<Value> {
        if n > MAX_TEXT {
            return malformed(format!("a text of {n} bytes; the limit is {MAX_TEXT}"));
        }
        match std::str::from_utf8(self.take(n)?) {
            Ok(text) => Ok(Value::Text(text.into())),
            Err(_) => malformed("text that is not UTF-8"),
        }
    }

    fn read_line(&mut self) -> Step<String> {
        let rest = &self.bytes[self.at..];
        let end = rest.iter().take(MAX_NAME).position(|b| *b == b'\n');
        let Some(end) = end else { return malformed(format!("a name of more than {MAX_NAME} bytes")) };
        self.at += end + 1;
        match std::str::from_utf8(&rest[..end]) {
            Ok(line) => Ok(line.to_string()),
            Err(_) => malformed("a name that is not UTF-8"),
        }
    }

    fn take_array<const N: usize>(&mut self) -> Step<[u8; N]> {
        let Some(bytes) = self.bytes[self.at..].first_chunk::<N>() else {
            return malformed("it ends before its last opcode");
        };
        self.at += N;
        Ok(*bytes)
    }

    fn take(&mut self, n: usize) -> Step<&[u8]> {
        let Some(bytes) = self.bytes[self.at..].get(..n) else {
            return malformed("it ends before its last opcode");
        };
        self.at += n;
        Ok(bytes)
    }
}

/// Returns the value of an imported name, if it is one that checkpoints need.
fn find_name(module: &str, name: &str) -> Step<Value> {
    let known = match (module, name) {
        ("collections", "OrderedDict") => Some(KnownName::OrderedDict),
        ("torch._utils", "_rebuild_tensor_v2") => Some(KnownName::RebuildTensor),
        ("torch._utils", "_rebuild_tensor_v3") => Some(KnownName::RebuildTensorOfDtype),
        ("torch._utils", "_rebuild_parameter") => Some(KnownName::RebuildParameter),
        ("torch.storage" | "torch", "UntypedStorage") => Some(KnownName::UntypedStorage),
        ("torch", _) => STORAGES
            .iter()
            .find(|(class, _)| *class == name)
            .map(|(_, dtype)| KnownName::StorageOf(dtype))
            .or_else(|| DTYPES.iter().find(|(d, _)| *d == name).map(|(_, dtype)| KnownName::Dtype(dtype))),
        _ => None,
    };
    match known {
        Some(known) => Ok(Value::Name(known)),
        // A name may hold control characters, which a terminal must not receive.
        None => Err(Refusal::Imports(format!("{module}.{name}").escape_debug().to_string())),
    }
}

/// Classes of storages in the module `torch`, with the safetensors names of their dtypes.
const STORAGES: [(&str, &str); 11] = [
    ("FloatStorage", "F32"),
    ("HalfStorage", "F16"),
    ("BFloat16Storage", "BF16"),
    ("DoubleStorage", "F64"),
    ("LongStorage", "I64"),
    ("IntStorage", "I32"),
    ("ShortStorage", "I16"),
    ("CharStorage", "I8"),
    ("ByteStorage", "U8"),
    ("BoolStorage", "BOOL"),
    ("ComplexFloatStorage", "C64"),
];

/// Dtypes in the module `torch`, with their safetensors names.
const DTYPES: [(&str, &str); 18] = [
    ("float32", "F32"),
    ("float16", "F16"),
    ("bfloat16", "BF16"),
    ("float64", "F64"),
    ("float8_e4m3fn", "F8_E4M3"),
    ("float8_e5m2", "F8_E5M2"),
    ("float8_e4m3fnuz", "F8_E4M3FNUZ"),
    ("float8_e5m2fnuz", "F8_E5M2FNUZ"),
    ("float8_e8m0fnu", "F8_E8M0"),
    ("int64", "I64"),
    ("int32", "I32"),
    ("int16", "I16"),
    ("int8", "I8"),
    ("uint8", "U8"),
    ("uint16", "U16"),
    ("uint32", "U32"),
    ("uint64", "U64"),
    ("bool", "BOOL"),
];

/// Returns the name of an opcode that imports, builds or calls something.
fn executing_opcode(opcode: u8) -> Option<&'static str> {
    Some(match opcode {
        b'i' => "INST",
        b'o' => "OBJ",
        0x81 => "NEWOBJ",
        0x92 => "NEWOBJ_EX",
        b'P' => "PERSID",
        0x82..=0x84 => "EXT",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refuse(bytes: &[u8]) -> PickleProblem {
        read_pickle(bytes).unwrap_err()
    }

    #[test]
    fn a_name_that_could_execute_something_is_refused_by_name() {
        let call = b"\x80\x02cos\nsystem\nX\x04\0\0\0echo\x85R.";
        assert_eq!(refuse(call), PickleProblem::Imports("os.system".into(), 2));
        let stacked = b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93.";
        assert_eq!(refuse(stacked), PickleProblem::Imports("builtins.eval".into(), 18));
        let control = b"c\x1b[2J\nx\n.";
        assert_eq!(refuse(control), PickleProblem::Imports("\\u{1b}[2J.x".into(), 0));
        for (bytes, name) in
            [(&b"}}\x81."[..], "NEWOBJ"), (b"}(}o.", "OBJ"), (b"])R.", "REDUCE"), (b"]}b.", "BUILD")]
        {
            assert!(matches!(refuse(bytes), PickleProblem::Executes(n, _) if n == name), "{name}");
        }
        assert!(matches!(refuse(b"ctorch\nFloatStorage\n)R."), PickleProblem::Executes("REDUCE", _)));
    }

    #[test]
    fn incomplete_and_absurd_pickles_are_refused() {
        for bytes in [
            &b""[..],
            b"N",
            b".",
            b"(.",
            b"a.",
            b"Nt.",
            b"h\x05.",
            b"X\xff\xff\xff\x7f.",
            b"\x8a\x09aaaaaaaaa.",
            b"}Nu.",
            b"}(Nu.",
            b"NQ.",
            b"X\x01\0\0\0\xff.",
            b"cos",
            b"I1\n.",
        ] {
            assert!(matches!(refuse(bytes), PickleProblem::Malformed(..)), "{bytes:?}");
        }
        let many = [vec![b'N'; MAX_VALUES + 1], vec![b'.']].concat();
        assert!(matches!(refuse(&many), PickleProblem::Malformed(why, _) if why.contains("values")));
    }

    #[test]
    fn numbers_keep_their_sign() {
        for (bytes, n) in [
            (&b"K\xff."[..], 255),
            (b"M\xff\xff.", 65_535),
            (b"J\xff\xff\xff\xff.", -1),
            (b"\x8a\0.", 0),
            (b"\x8a\x01\xff.", -1),
            (b"\x8a\x05\0\0\0\0\x01.", 1 << 32),
        ] {
            let (values, root) = read_pickle(bytes).unwrap();
            assert!(matches!(values.get(root), Value::Int(found) if *found == n), "{bytes:?}");
        }
    }
}
