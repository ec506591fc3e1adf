//! Where the rows of a rank lie in a tensor whose rows are sharded.

/// Where the rows of a rank lie in the whole tensor.
#[derive(Debug, Clone, Copy)]
pub struct RowSpan {
    /// Index of the first row.
    pub first: usize,
    /// Rows of the whole tensor.
    pub all: usize,
    /// Rows of the whole tensor that are no padding.
    pub tokens: usize,
}

impl RowSpan {
    /// Returns the one of `homes` equal parts of the whole tensor in which row `row` of the rank lies.
    pub(super) fn home_of(self, row: usize, homes: usize) -> usize {
        (self.first + row) / self.all.div_ceil(homes).max(1)
    }

    /// Returns the sequence of a row of the whole tensor, of which each has equally many of the rows that are no padding,
    /// and the number of the row in it.
    pub(super) fn sequence_of(self, row: usize, sequences: usize) -> (usize, usize) {
        let rows = (self.tokens / sequences.max(1)).max(1);
        (row / rows, row % rows)
    }
}
