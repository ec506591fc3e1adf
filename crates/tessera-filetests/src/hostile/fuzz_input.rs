//! Decodes fuzzer bytes into choices.

/// Consumes bytes from the front. Once they are used up, every choice is the first one.
#[derive(Debug, Clone)]
pub(super) struct FuzzInput<'a>(&'a [u8]);

/// Boundary values at which code may change its behaviour.
const BOUNDARY_VALUES: [u64; 24] = [
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

impl<'a> FuzzInput<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> FuzzInput<'a> {
        FuzzInput(bytes)
    }

    pub(super) fn has_more(&self) -> bool {
        !self.0.is_empty()
    }

    pub(super) fn next_byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    /// Returns a number below `n`, or 0 if `n` is 0.
    pub(super) fn next_below(&mut self, n: usize) -> usize {
        let wide = if n > 256 { usize::from(self.next_byte()) << 8 } else { 0 };
        (wide | usize::from(self.next_byte())).checked_rem(n).unwrap_or(0)
    }

    pub(super) fn next_flag(&mut self) -> bool {
        self.next_byte() & 1 == 1
    }

    pub(super) fn pick_from<'b, T>(&mut self, options: &'b [T]) -> Option<&'b T> {
        options.get(self.next_below(options.len()))
    }

    /// Returns a small number or a boundary value.
    pub(super) fn next_number(&mut self) -> u64 {
        let b = self.next_byte();
        match b {
            0..=199 => u64::from(b % 20),
            _ => BOUNDARY_VALUES[usize::from(b) % BOUNDARY_VALUES.len()],
        }
    }

    /// Returns an index below `n` and occasionally an arbitrary number.
    pub(super) fn next_index(&mut self, n: usize) -> u32 {
        match self.next_byte() {
            0..=15 => self.next_number() as u32,
            _ => self.next_below(n) as u32,
        }
    }
}
