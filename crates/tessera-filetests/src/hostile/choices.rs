//! Bytes as choices.

/// Takes choices off the front of bytes. When they are used up, every choice is the first.
#[derive(Debug, Clone)]
pub(super) struct Choices<'a>(&'a [u8]);

/// Numbers at which something changes its behaviour.
const EDGES: [u64; 24] = [
    0,
    1,
    2,
    3,
    4,
    6,
    8,
    12,
    64,
    255,
    4096,
    65_535,
    65_536,
    (1 << 31) - 1,
    (1 << 32) - 1,
    1 << 32,
    1 << 40,
    (1 << 40) + 1,
    1 << 46,
    (1 << 46) + 1,
    (1 << 63) - 1,
    1 << 63,
    u64::MAX - 1,
    u64::MAX,
];

impl<'a> Choices<'a> {
    pub(super) fn of(bytes: &'a [u8]) -> Choices<'a> {
        Choices(bytes)
    }

    pub(super) fn more(&self) -> bool {
        !self.0.is_empty()
    }

    pub(super) fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    /// A number below `n`; 0 for no numbers.
    pub(super) fn below(&mut self, n: usize) -> usize {
        let wide = if n > 256 { usize::from(self.byte()) << 8 } else { 0 };
        (wide | usize::from(self.byte())).checked_rem(n).unwrap_or(0)
    }

    pub(super) fn flag(&mut self) -> bool {
        self.byte() & 1 == 1
    }

    pub(super) fn pick<'b, T>(&mut self, of: &'b [T]) -> Option<&'b T> {
        of.get(self.below(of.len()))
    }

    /// A small number or one at an edge.
    pub(super) fn number(&mut self) -> u64 {
        let b = self.byte();
        match b {
            0..=199 => u64::from(b % 20),
            _ => EDGES[usize::from(b) % EDGES.len()],
        }
    }

    /// Mostly an index below `n`, now and then any.
    pub(super) fn index(&mut self, n: usize) -> u32 {
        match self.byte() {
            0..=15 => self.number() as u32,
            _ => self.below(n) as u32,
        }
    }
}
