//! A reader of the subset of pickle that holds data alone: numbers, text, lists, tuples and dicts.
//!
//! Pickle is a program for a stack machine, and its opcodes can import and call anything. This reader
//! has no opcode that does, and rejects a file that uses one by the opcode's name. Its memory does not
//! grow with the file: the caller takes each entry of the one long list as soon as it is complete.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io::BufRead;
use std::rc::Rc;

/// Maximum nesting of containers. Flight Recorder dumps have 6 levels.
const MAX_DEPTH: u32 = 32;
/// Maximum number of values on the stack. The longest list of a dump that is not taken entry by entry
/// has one value per rank of a group, or per tensor of a collective.
const MAX_STACK: usize = 1 << 20;
/// Maximum bytes of one text.
const MAX_TEXT: u64 = 1 << 20;
/// Maximum bytes of the texts and containers that the file asks to remember.
const MAX_MEMO_BYTES: u64 = 256 << 20;
/// Maximum bytes of the file between two entries that are taken, and around their list.
const MAX_ENTRY_BYTES: u64 = 16 << 20;
/// Maximum number of values before the streamed list in its dict.
const MAX_HEADER: usize = 64;
/// Maximum bytes of what the file recalls, beyond [`RECALL_RATIO`] times the bytes that were read. Values
/// that repeat one another would grow exponentially for whoever reads them.
const MAX_RECALLED_BYTES: u64 = 64 << 20;
/// An opcode of 2 bytes recalls a path or a function of up to a few hundred.
const RECALL_RATIO: u64 = 256;
/// Bytes that any value takes.
const VALUE_BYTES: u64 = 64;

/// A value of a pickle.
#[derive(Debug, Clone)]
pub(crate) enum PickleValue {
    None,
    Bool(bool),
    Int(i64),
    /// A duration, which nothing here needs.
    Float,
    Text(Rc<str>),
    List(Rc<Items>),
    Tuple(Rc<Items>),
    Dict(Rc<Pairs>),
}

/// The items of a list or a tuple.
#[derive(Debug, Default)]
pub(crate) struct Items {
    items: RefCell<Vec<PickleValue>>,
    extent: Extent,
}

/// The keys and values of a dict.
#[derive(Debug, Default)]
pub(crate) struct Pairs {
    pairs: RefCell<Vec<(PickleValue, PickleValue)>>,
    extent: Extent,
}

/// How much a container holds, and what the file did with it.
#[derive(Debug, Default)]
struct Extent {
    /// Levels of containers within this one.
    inner_depth: Cell<u32>,
    /// Bytes of all items, each as often as it occurs.
    bytes: Cell<u64>,
    is_remembered: Cell<bool>,
    is_recalled: Cell<bool>,
}

impl PickleValue {
    /// Returns the value of a key, if this is a dict that has it.
    pub(crate) fn get(&self, key: &str) -> Option<PickleValue> {
        let PickleValue::Dict(d) = self else { return None };
        let pairs = d.pairs.borrow();
        pairs.iter().find(|(k, _)| k.is_text(key)).map(|(_, v)| v.clone())
    }

    /// Returns the keys and values, if this is a dict.
    pub(crate) fn pairs(&self) -> Vec<(PickleValue, PickleValue)> {
        if let PickleValue::Dict(d) = self { d.pairs.borrow().clone() } else { Vec::new() }
    }

    /// Returns the items, if this is a list or a tuple.
    pub(crate) fn items(&self) -> Option<Vec<PickleValue>> {
        match self {
            PickleValue::List(l) | PickleValue::Tuple(l) => Some(l.items.borrow().clone()),
            _ => None,
        }
    }

    /// Returns whether this is a dict without keys.
    fn is_empty_dict(&self) -> bool {
        matches!(self, PickleValue::Dict(d) if d.pairs.borrow().is_empty())
    }

    #[inline]
    fn is_text(&self, text: &str) -> bool {
        matches!(self, PickleValue::Text(t) if **t == *text)
    }

    pub(crate) fn as_text(&self) -> Option<Rc<str>> {
        if let PickleValue::Text(t) = self { Some(t.clone()) } else { None }
    }

    pub(crate) fn as_int(&self) -> Option<i64> {
        if let PickleValue::Int(i) = self { Some(*i) } else { None }
    }

    pub(crate) fn as_bool(&self) -> Option<bool> {
        if let PickleValue::Bool(b) = self { Some(*b) } else { None }
    }

    #[inline]
    fn extent(&self) -> Option<&Extent> {
        match self {
            PickleValue::List(l) | PickleValue::Tuple(l) => Some(&l.extent),
            PickleValue::Dict(d) => Some(&d.extent),
            _ => None,
        }
    }

    #[inline]
    fn depth(&self) -> u32 {
        self.extent().map_or(0, |e| e.inner_depth.get() + 1)
    }

    /// Returns the bytes of the value and of all within it, each as often as it occurs.
    #[inline]
    fn count_bytes(&self) -> u64 {
        let text = if let PickleValue::Text(t) = self { t.len() as u64 } else { 0 };
        VALUE_BYTES + text + self.extent().map_or(0, |e| e.bytes.get())
    }
}

/// Why a pickle was rejected, and at which byte.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PickleError {
    /// Byte of the file at which the rejected opcode begins.
    pub(crate) byte: u64,
    /// What is wrong.
    pub(crate) problem: PickleProblem,
}

/// What is wrong with a pickle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PickleProblem {
    /// An opcode that imports, builds or calls.
    Executes(&'static str),
    /// An opcode of data that no Flight Recorder dump uses.
    Unknown(u8),
    /// The file ends or its opcodes do not fit together.
    Malformed(String),
    /// A limit of this reader.
    TooLarge(String),
}

enum StackItem {
    Mark,
    Value(PickleValue),
}

/// Reads a pickle whose value is a dict. Each item of the list under the key `streamed` goes to `take`
/// as soon as it is complete, and the list is empty in the result.
///
/// # Errors
/// The first opcode that is rejected, or what `take` returns.
pub(crate) fn read_pickle<R: BufRead>(
    reader: R,
    streamed: &str,
    take: &mut dyn FnMut(PickleValue) -> Result<(), String>,
) -> Result<PickleValue, PickleError> {
    let mut machine = Machine {
        reader,
        byte: 0,
        stack: Vec::new(),
        memo: Memo::default(),
        memo_bytes: 0,
        recalled_bytes: 0,
    };
    let mut taken_at = 0;
    loop {
        let at = machine.byte;
        let fail = |problem| PickleError { byte: at, problem };
        let opcode = machine.read_bytes::<1>().map_err(fail)?[0];
        // Memo opcodes name the value on top; any other opcode shows that it is complete.
        if !matches!(opcode, b'q' | b'r' | 0x94)
            && let Some(item) = machine.pop_streamed(streamed)
        {
            taken_at = at;
            take(item).map_err(|why| fail(PickleProblem::Malformed(why)))?;
        }
        if at - taken_at > MAX_ENTRY_BYTES {
            let limit = MAX_ENTRY_BYTES >> 20;
            return Err(fail(PickleProblem::TooLarge(format!("an entry of more than {limit} MiB"))));
        }
        if let Some(value) = machine.execute(opcode).map_err(fail)? {
            return Ok(value);
        }
        if matches!(opcode, b'a' | b'e') {
            for item in machine.drain_streamed(streamed) {
                taken_at = at;
                take(item).map_err(|why| fail(PickleProblem::Malformed(why)))?;
            }
        }
        if machine.stack.len() > MAX_STACK {
            return Err(fail(PickleProblem::TooLarge(format!("more than {MAX_STACK} values on the stack"))));
        }
    }
}

/// The values that the file asks to remember, by index. Writers count indices from 0, so a list holds them
/// without a hash for each lookup. An index that leaves a gap goes to the map, because the file may name any.
#[derive(Default)]
struct Memo {
    dense: Vec<PickleValue>,
    sparse: HashMap<u32, PickleValue>,
}

impl Memo {
    fn len(&self) -> usize {
        self.dense.len() + self.sparse.len()
    }

    #[inline]
    fn get(&self, index: u32) -> Option<&PickleValue> {
        self.dense.get(index as usize).or_else(|| self.sparse.get(&index))
    }

    fn insert(&mut self, index: u32, value: PickleValue) {
        let at = index as usize;
        if let Some(known) = self.dense.get_mut(at) {
            *known = value;
        } else if at == self.dense.len() && !self.sparse.contains_key(&index) {
            self.dense.push(value);
        } else {
            self.sparse.insert(index, value);
        }
    }
}

struct Machine<R> {
    reader: R,
    byte: u64,
    stack: Vec<StackItem>,
    memo: Memo,
    memo_bytes: u64,
    recalled_bytes: u64,
}

type Step<T> = Result<T, PickleProblem>;

fn malformed<T>(what: impl Into<String>) -> Step<T> {
    Err(PickleProblem::Malformed(what.into()))
}

impl<R: BufRead> Machine<R> {
    /// Takes the item on top if it belongs to the streamed list: the stack is then the outermost dict
    /// and its mark, other keys and values, the key and its list, the list's mark, and the item.
    fn pop_streamed(&mut self, streamed: &str) -> Option<PickleValue> {
        use StackItem::{Mark, Value};
        // Most opcodes end here, and this runs once per opcode.
        let [.., Mark, Value(PickleValue::Dict(_))] = &self.stack[..] else { return None };
        let [
            Value(PickleValue::Dict(_)),
            Mark,
            before @ ..,
            Value(key),
            Value(PickleValue::List(_)),
            Mark,
            Value(item),
        ] = &self.stack[..]
        else {
            return None;
        };
        if before.len() > MAX_HEADER || before.iter().any(|item| matches!(item, Mark)) {
            return None;
        }
        if !key.is_text(streamed) {
            return None;
        }
        // An entry under construction has its own mark above it, so this one is complete; an empty
        // dict is the start of one.
        if item.is_empty_dict() {
            return None;
        }
        match self.stack.pop() {
            Some(Value(item)) => Some(item),
            _ => None,
        }
    }

    /// Takes the items that an opcode just added to the streamed list itself.
    fn drain_streamed(&mut self, streamed: &str) -> Vec<PickleValue> {
        use StackItem::{Mark, Value};
        match &self.stack[..] {
            [Value(PickleValue::Dict(_)), Mark, before @ .., Value(key), Value(PickleValue::List(list))]
                if key.is_text(streamed)
                    && before.len() <= MAX_HEADER
                    && !before.iter().any(|item| matches!(item, Mark)) =>
            {
                list.items.take()
            }
            _ => Vec::new(),
        }
    }

    /// Executes an opcode; returns the value of the pickle at its end.
    fn execute(&mut self, opcode: u8) -> Step<Option<PickleValue>> {
        use PickleValue as V;
        let value = match opcode {
            b'.' => return self.pop_value().map(Some),
            b'N' => V::None,
            0x88 => V::Bool(true),
            0x89 => V::Bool(false),
            b'K' => V::Int(i64::from(self.read_bytes::<1>()?[0])),
            b'M' => V::Int(i64::from(u16::from_le_bytes(self.read_bytes()?))),
            b'J' => V::Int(i64::from(i32::from_le_bytes(self.read_bytes()?))),
            0x8a => {
                let n = u64::from(self.read_bytes::<1>()?[0]);
                self.read_long(n)?
            }
            0x8b => {
                let n = u64::from(u32::from_le_bytes(self.read_bytes()?));
                self.read_long(n)?
            }
            b'G' => {
                self.read_bytes::<8>()?;
                V::Float
            }
            b'X' => {
                let n = u64::from(u32::from_le_bytes(self.read_bytes()?));
                self.read_text(n)?
            }
            0x8c => {
                let n = u64::from(self.read_bytes::<1>()?[0]);
                self.read_text(n)?
            }
            b'}' => V::Dict(Rc::default()),
            b']' => V::List(Rc::default()),
            b')' => self.make_tuple(0)?,
            0x85 => self.make_tuple(1)?,
            0x86 => self.make_tuple(2)?,
            0x87 => self.make_tuple(3)?,
            b't' => {
                let n = self.count_above_mark()?;
                let tuple = self.make_tuple(n)?;
                self.pop_mark()?;
                tuple
            }
            b'h' => {
                let index = u32::from(self.read_bytes::<1>()?[0]);
                self.recall(index)?
            }
            b'j' => {
                let index = u32::from_le_bytes(self.read_bytes()?);
                self.recall(index)?
            }
            _ => return self.execute_effect(opcode).map(|()| None),
        };
        self.stack.push(StackItem::Value(value));
        Ok(None)
    }

    /// Executes an opcode that pushes no value.
    fn execute_effect(&mut self, opcode: u8) -> Step<()> {
        match opcode {
            // The protocol, and the length of a frame, which only a reader of blocks needs.
            0x80 => self.read_bytes::<1>().map(drop),
            0x95 => self.read_bytes::<8>().map(drop),
            b'(' => {
                self.stack.push(StackItem::Mark);
                Ok(())
            }
            b'q' => {
                let index = u32::from(self.read_bytes::<1>()?[0]);
                self.remember(index)
            }
            b'r' => {
                let index = u32::from_le_bytes(self.read_bytes()?);
                self.remember(index)
            }
            0x94 => self.remember(u32::try_from(self.memo.len()).unwrap_or(u32::MAX)),
            b'a' => {
                let item = self.pop_value()?;
                self.extend_list(vec![item])
            }
            b'e' => {
                let items = self.pop_to_mark()?;
                self.extend_list(items)
            }
            b's' => {
                let value = self.pop_value()?;
                let key = self.pop_value()?;
                self.extend_dict(vec![key, value])
            }
            b'u' => {
                let items = self.pop_to_mark()?;
                self.extend_dict(items)
            }
            _ => {
                Err(executing_opcode(opcode).map_or(PickleProblem::Unknown(opcode), PickleProblem::Executes))
            }
        }
    }

    fn extend_list(&mut self, items: Vec<PickleValue>) -> Step<()> {
        let Some(StackItem::Value(PickleValue::List(list))) = self.stack.last() else {
            return malformed("items without a list");
        };
        let list = list.clone();
        self.grow(&list.extent, &items)?;
        list.items.borrow_mut().extend(items);
        Ok(())
    }

    fn extend_dict(&mut self, items: Vec<PickleValue>) -> Step<()> {
        let Some(StackItem::Value(PickleValue::Dict(dict))) = self.stack.last() else {
            return malformed("keys without a dict");
        };
        let dict = dict.clone();
        self.grow(&dict.extent, &items)?;
        let mut pairs = dict.pairs.borrow_mut();
        pairs.reserve(items.len() / 2);
        let mut items = items.into_iter();
        while let Some(key) = items.next() {
            let Some(value) = items.next() else { return malformed("a key without a value") };
            pairs.push((key, value));
        }
        Ok(())
    }

    fn make_tuple(&mut self, n: usize) -> Step<PickleValue> {
        let mut items = Vec::with_capacity(n.min(16));
        for _ in 0..n {
            items.push(self.pop_value()?);
        }
        items.reverse();
        let tuple = Items::default();
        self.grow(&tuple.extent, &items)?;
        *tuple.items.borrow_mut() = items;
        Ok(PickleValue::Tuple(Rc::new(tuple)))
    }

    fn pop_value(&mut self) -> Step<PickleValue> {
        match self.stack.pop() {
            Some(StackItem::Value(value)) => Ok(value),
            _ => malformed("an opcode without its operand"),
        }
    }

    fn count_above_mark(&self) -> Step<usize> {
        let mark = self.stack.iter().rposition(|item| matches!(item, StackItem::Mark));
        mark.map_or_else(|| malformed("an opcode without its mark"), |m| Ok(self.stack.len() - m - 1))
    }

    fn pop_mark(&mut self) -> Step<()> {
        self.stack.pop();
        Ok(())
    }

    fn pop_to_mark(&mut self) -> Step<Vec<PickleValue>> {
        let n = self.count_above_mark()?;
        let at = self.stack.len() - n;
        let mut items = Vec::with_capacity(n);
        items.extend(self.stack.drain(at..).filter_map(|item| match item {
            StackItem::Value(value) => Some(value),
            StackItem::Mark => None,
        }));
        self.pop_mark()?;
        Ok(items)
    }

    /// Remembers the value on top, and counts what it then keeps alive.
    fn remember(&mut self, index: u32) -> Step<()> {
        let Some(StackItem::Value(value)) = self.stack.last() else {
            return malformed("a memo of nothing");
        };
        let (value, bytes) = (value.clone(), value.count_bytes());
        if let Some(extent) = value.extent() {
            extent.is_remembered.set(true);
        }
        self.memo.insert(index, value);
        self.keep_bytes(bytes)
    }

    fn keep_bytes(&mut self, bytes: u64) -> Step<()> {
        self.memo_bytes = self.memo_bytes.saturating_add(bytes);
        if self.memo_bytes > MAX_MEMO_BYTES {
            let limit = MAX_MEMO_BYTES >> 20;
            return Err(PickleProblem::TooLarge(format!("more than {limit} MiB of shared values")));
        }
        Ok(())
    }

    fn recall(&mut self, index: u32) -> Step<PickleValue> {
        let Some(value) = self.memo.get(index).cloned() else {
            return malformed(format!("no memo {index}"));
        };
        if let Some(extent) = value.extent() {
            extent.is_recalled.set(true);
        }
        self.recalled_bytes = self.recalled_bytes.saturating_add(value.count_bytes());
        let limit = MAX_RECALLED_BYTES.saturating_add(RECALL_RATIO.saturating_mul(self.byte));
        if self.recalled_bytes > limit {
            return Err(PickleProblem::TooLarge("values that repeat one another too often".to_string()));
        }
        Ok(value)
    }

    /// Counts the new items of a container. A container that was recalled is complete: one that changes
    /// afterwards could contain itself.
    fn grow(&mut self, extent: &Extent, items: &[PickleValue]) -> Step<()> {
        if extent.is_recalled.get() {
            return malformed("a container that changes after it was shared");
        }
        let inner = items.iter().map(PickleValue::depth).max().unwrap_or(0).max(extent.inner_depth.get());
        if inner >= MAX_DEPTH {
            return Err(PickleProblem::TooLarge(format!("containers nested more than {MAX_DEPTH} deep")));
        }
        extent.inner_depth.set(inner);
        let bytes = items.iter().fold(0u64, |n, item| n.saturating_add(item.count_bytes()));
        extent.bytes.set(extent.bytes.get().saturating_add(bytes));
        if extent.is_remembered.get() { self.keep_bytes(bytes) } else { Ok(()) }
    }

    fn read_long(&mut self, n: u64) -> Step<PickleValue> {
        if n > 8 {
            return malformed("a whole number of more than 64 bits");
        }
        let mut bytes = [0u8; 8];
        self.read_into(&mut bytes[..n as usize])?;
        // Two's complement, little endian, as long as its value needs.
        let shift = 64 - 8 * n as u32;
        let value = if n == 0 { 0 } else { (i64::from_le_bytes(bytes) << shift) >> shift };
        Ok(PickleValue::Int(value))
    }

    fn read_text(&mut self, n: u64) -> Step<PickleValue> {
        if n > MAX_TEXT {
            return Err(PickleProblem::TooLarge(format!("a text of {n} bytes; the limit is {MAX_TEXT}")));
        }
        let mut bytes = vec![0u8; n as usize];
        self.read_into(&mut bytes)?;
        match String::from_utf8(bytes) {
            Ok(text) => Ok(PickleValue::Text(text.into())),
            Err(_) => malformed("text that is not UTF-8"),
        }
    }

    #[inline]
    fn read_bytes<const N: usize>(&mut self) -> Step<[u8; N]> {
        // Nearly always the buffer holds them, and a copy of known length takes no call.
        if let Ok(buffer) = self.reader.fill_buf()
            && let Some(bytes) = buffer.first_chunk::<N>()
        {
            let bytes = *bytes;
            self.reader.consume(N);
            self.byte += N as u64;
            return Ok(bytes);
        }
        let mut bytes = [0u8; N];
        self.read_into(&mut bytes)?;
        Ok(bytes)
    }

    fn read_into(&mut self, bytes: &mut [u8]) -> Step<()> {
        self.reader.read_exact(bytes).or_else(|e| match e.kind() {
            std::io::ErrorKind::UnexpectedEof => malformed("the file ends before the pickle does"),
            _ => malformed(e.to_string()),
        })?;
        self.byte += bytes.len() as u64;
        Ok(())
    }
}

/// Returns the name of an opcode that imports, builds or calls something.
fn executing_opcode(opcode: u8) -> Option<&'static str> {
    Some(match opcode {
        b'c' => "GLOBAL",
        0x93 => "STACK_GLOBAL",
        b'R' => "REDUCE",
        b'b' => "BUILD",
        b'i' => "INST",
        b'o' => "OBJ",
        0x81 => "NEWOBJ",
        0x92 => "NEWOBJ_EX",
        b'P' => "PERSID",
        b'Q' => "BINPERSID",
        0x82..=0x84 => "EXT",
        _ => return None,
    })
}

#[cfg(test)]
mod tests;
